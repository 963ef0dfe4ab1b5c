//! `ui`: the viewer on loopback, with the user's credentials added to each request on its way.
//!
//! Only a browser that was given the start URL gets in: it carries a random key that becomes a cookie. Host and Origin are
//! checked, so that no other site's page can use it.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Redirect, Response};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Mutex;
use tokio::time::{Duration, Instant};

use crate::connection::{Connection, encode};

const COOKIE: &str = "replayfork-ui";
/// Tokens that were asked for are good for ten minutes.
const TOKEN_FOR: Duration = Duration::from_secs(300);
const MAX_REQUEST: usize = 16 << 20;

struct Ui {
    connection: Connection,
    key: String,
    port: u16,
    token: Mutex<Option<(Instant, String)>>,
}

/// # Errors
/// The port is taken.
pub async fn serve(connection: Connection, port: u16) -> anyhow::Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    let port = listener.local_addr()?.port();
    let key = hex::encode(rand::random::<[u8; 16]>());
    // Fails here, with the reason, rather than on the first page.
    let token = connection.token().await?;
    let namespace = encode(&connection.namespace);
    println!("The viewer is at http://127.0.0.1:{port}/?key={key}&namespace={namespace}");
    println!("Ctrl-C ends it.");
    let ui = Arc::new(Ui { connection, key, port, token: Mutex::new(Some((Instant::now(), token))) });
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let router = axum::Router::new().fallback(handle).with_state(ui);
    tokio::select! {
        served = async { axum::serve(listener, router).await } => served?,
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    Ok(())
}

async fn handle(State(ui): State<Arc<Ui>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let host = parts.headers.get(header::HOST).and_then(|h| h.to_str().ok()).unwrap_or_default();
    let ours = [format!("127.0.0.1:{}", ui.port), format!("localhost:{}", ui.port)];
    if !ours.iter().any(|o| o == host) {
        return (StatusCode::FORBIDDEN, "this address answers for 127.0.0.1 only").into_response();
    }
    let origin = parts.headers.get(header::ORIGIN).and_then(|o| o.to_str().ok());
    if origin.is_some_and(|o| !ours.iter().any(|h| o == format!("http://{h}"))) {
        return (StatusCode::FORBIDDEN, "requests of other sites are not answered").into_response();
    }
    let query = parts.uri.query().unwrap_or_default();
    if parts.uri.path() == "/" && query.split('&').any(|p| p.strip_prefix("key=") == Some(&ui.key)) {
        let mut response = Redirect::to(&format!("/replay/?namespace={}", encode(&ui.connection.namespace))).into_response();
        let cookie = format!("{COOKIE}={}; HttpOnly; SameSite=Strict; Path=/", ui.key);
        if let Ok(cookie) = HeaderValue::from_str(&cookie) {
            response.headers_mut().insert(header::SET_COOKIE, cookie);
        }
        return response;
    }
    if !has_cookie(&parts.headers, &ui.key) {
        return (StatusCode::UNAUTHORIZED, "open the URL that `kubectl replay ui` printed").into_response();
    }
    let Ok(body) = axum::body::to_bytes(body, MAX_REQUEST).await else {
        return (StatusCode::PAYLOAD_TOO_LARGE, "the request is too large").into_response();
    };
    match pass_on(&ui, &parts, body).await {
        Ok(response) => response,
        Err(error) => (StatusCode::BAD_GATEWAY, format!("{error:#}")).into_response(),
    }
}

fn has_cookie(headers: &HeaderMap, key: &str) -> bool {
    let cookies = headers.get_all(header::COOKIE).iter().filter_map(|c| c.to_str().ok());
    cookies.flat_map(|c| c.split(';')).any(|c| c.trim().strip_prefix(COOKIE).and_then(|c| c.strip_prefix('=')) == Some(key))
}

async fn token(ui: &Ui) -> anyhow::Result<String> {
    let mut token = ui.token.lock().await;
    if let Some((at, token)) = &*token
        && at.elapsed() < TOKEN_FOR
    {
        return Ok(token.clone());
    }
    let fresh = ui.connection.token().await?;
    *token = Some((Instant::now(), fresh.clone()));
    Ok(fresh)
}

async fn pass_on(ui: &Ui, parts: &axum::http::request::Parts, body: Bytes) -> anyhow::Result<Response> {
    let path = parts.uri.path_and_query().map_or("/", |p| p.as_str());
    // The Kubernetes API's proxy writes its own prefix before the addresses in a page.
    let path = ui.connection.without_prefix(path);
    let content_type = parts.headers.get(header::CONTENT_TYPE).and_then(|c| c.to_str().ok());
    let answer = ui.connection.send(parts.method.clone(), path, body.to_vec(), content_type, &token(ui).await?).await?;
    let (answered, body) = answer.into_parts();
    let mut response = Response::new(axum::body::Body::new(body));
    *response.status_mut() = answered.status;
    for name in [
        header::CONTENT_TYPE,
        header::CONTENT_ENCODING,
        header::CACHE_CONTROL,
        header::ETAG,
        header::CONTENT_DISPOSITION,
        header::X_CONTENT_TYPE_OPTIONS,
    ] {
        if let Some(value) = answered.headers.get(&name) {
            response.headers_mut().insert(name, value.clone());
        }
    }
    Ok(response)
}
