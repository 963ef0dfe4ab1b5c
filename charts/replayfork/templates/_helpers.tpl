{{/* Labels of every object: (dict "root" $ "part" "api-server") */}}
{{- define "replayfork.labels" -}}
{{ include "replayfork.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: replayfork
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{/* What selects a part's pods; never changes between versions. */}}
{{- define "replayfork.selector" -}}
app.kubernetes.io/name: replayfork
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{/* The same as k=v,k=v, for the operator, which writes it into the sandboxes' NetworkPolicies. */}}
{{- define "replayfork.apiPodSelector" -}}
app.kubernetes.io/name=replayfork,app.kubernetes.io/instance={{ .Release.Name }},app.kubernetes.io/component=api-server
{{- end }}

{{/* An image: (dict "root" $ "name" "operator") */}}
{{- define "replayfork.image" -}}
{{- $images := .root.Values.images -}}
{{- with $images.registry }}{{ . }}/{{ end -}}
replayfork/{{ .name }}:{{ $images.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* Where and how a part's pods run: (dict "root" $ "part" "operator" "values" .Values.operator) */}}
{{- define "replayfork.placement" -}}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml .values.topologySpreadConstraints | nindent 2 }}
{{- else if gt (int .values.replicas) 1 }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "replayfork.selector" . | nindent 8 }}
{{- end }}
{{- end }}

{{- define "replayfork.podMetadata" -}}
labels:
  {{- include "replayfork.labels" . | nindent 2 }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- if or .values.podAnnotations .annotations }}
annotations:
  {{- toYaml (merge dict (.values.podAnnotations | default dict) (.annotations | default dict)) | nindent 2 }}
{{- end }}
{{- end }}

{{/* The model endpoints as the api-server reads them, each key in a file of its own. */}}
{{- define "replayfork.endpoints" -}}
{{- $all := dict -}}
{{- range $name, $endpoint := .Values.models.endpoints -}}
{{- $one := omit $endpoint "existingSecret" -}}
{{- if $endpoint.existingSecret -}}
{{- $_ := set $one "keyFile" (printf "/etc/replayfork/endpoints/keys/%s" $name) -}}
{{- end -}}
{{- $_ := set $all $name $one -}}
{{- end -}}
{{- toJson $all -}}
{{- end }}

{{- define "replayfork.databaseSecret" -}}
{{- if not .Values.database.existingSecret -}}
{{- fail (printf "\n\ndatabase.existingSecret is not set. ReplayFork keeps its state in a Postgres of yours. Make a Secret with its URL:\n\n  kubectl -n %s create secret generic replayfork-database --from-literal=url=postgres://USER:PASSWORD@HOST:5432/DATABASE\n\nand install with --set database.existingSecret=replayfork-database\n" .Release.Namespace) -}}
{{- end -}}
{{- .Values.database.existingSecret -}}
{{- end }}
